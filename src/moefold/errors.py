"""The one exception a user can cause: a message that names the key, the value, the rule and the way out."""


class ConfigError(ValueError):
    """A setting, a file or a combination that cannot work. The command line prints it as one message and exits 2."""
