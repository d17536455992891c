"""One tree of errors. A message says what, expected, got, and what to do."""


class KVGroupsError(Exception):
    """The root of every error that kvgroups raises on purpose."""


class SpecError(KVGroupsError, ValueError):
    """A spec or a config that contradicts itself; the message names field, value and what would be right."""


class ShapeError(KVGroupsError, ValueError):
    """A tensor or a row of the wrong shape, dtype, device or range."""


class OutOfRangeError(KVGroupsError, IndexError):
    """A block id, slot, table row or start location that does not exist; the message names it and its place."""


class SanitizerError(KVGroupsError):
    """`KVGroupsConfig(sanitize=True)` saw a block used against a rule; the message names rule, group, block and request."""


class UnsupportedModelError(KVGroupsError, ValueError):
    """A model with a layer that no adapter can serve; the message names the layer and its class."""


class UnsupportedCallError(KVGroupsError, ValueError):
    """A call that a patched model does not serve; the message names the argument and the setting to change."""


class BackendUnavailableError(KVGroupsError, RuntimeError):
    """No backend serves the operation; the message lists every reason and the backend that would work."""


class OutOfBlocksError(KVGroupsError, RuntimeError):
    """Memory is too small; the message names the KV-cache group, the need and what there is."""
