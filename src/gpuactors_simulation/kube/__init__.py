"""A Kubernetes API server in memory, with the kinds that a DRA driver of a node meets, and its faults. It answers as a
real one of 1.35 answers (tests/node/originals plays one script against both) and was recorded to answer
(tests/kube/recorded)."""
