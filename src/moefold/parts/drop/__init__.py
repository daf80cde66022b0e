"""Orders of the tokens that an expert keeps."""
