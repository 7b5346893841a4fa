"""The DRA plugin's side of kubelet: registration, prepare and unprepare of claims, the health stream."""
