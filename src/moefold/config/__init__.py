"""The recipe. It stands on `base/`, `sections/` and `groups/`, and is read by `keys/`, `tables/` and `upgrade/`."""
