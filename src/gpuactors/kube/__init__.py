"""The Kubernetes API server: reads claims and our node, keeps ResourceSlices, posts events. Only `--dra on`,
`--compute-domains` and `--events on` import it."""
