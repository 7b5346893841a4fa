"""The Kubernetes API server: reads claims and our node, and keeps ResourceSlices. Only
`--dra on` and `--compute-domains` import it."""
