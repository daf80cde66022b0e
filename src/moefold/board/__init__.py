"""The board: files of runs read while they grow, an HTTP server that shows them, and a static export."""
