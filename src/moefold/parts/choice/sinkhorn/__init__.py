"""Choice balanced by Sinkhorn iterations."""
