"""The DRA manager of the fake kubelet: plugins of `plugins_registry`, claims prepared and unprepared, their health."""
