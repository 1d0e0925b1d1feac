"""The one exception whose message is written for the person who started the job."""


class UserError(ValueError):
    """Bad input: the message names the option, the value, the rule and the remedy; no traceback is shown."""
