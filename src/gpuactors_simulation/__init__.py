"""Shipped fakes: a node's directory tree, a kubelet, scenarios. Used by `gpuactors simulate` and by the tests.

May import any package of gpuactors; only the command line imports it. Must not know how the daemon decides: a fake that
shares the daemon's logic would share its mistakes.
"""
