"""Multi-head latent attention."""
