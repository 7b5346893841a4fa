"""The daemon's HTTP endpoints: metrics, liveness, readiness, state. They read; nothing can be changed over them."""
