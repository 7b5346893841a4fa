"""The composition of the daemon: `app.py` creates every channel, cell, actor and adaptor. What can be off (claims,
compute domains, HTTP endpoints, Kubernetes Events) is wired in files of its own, which are imported where it is on."""
