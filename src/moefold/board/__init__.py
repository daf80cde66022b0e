"""The board: incremental readers of the files of runs, an HTTP server that shows them, and a static export."""
