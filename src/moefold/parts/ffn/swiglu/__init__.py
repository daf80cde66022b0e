"""SwiGLU, the feed-forward network of dense layers."""
