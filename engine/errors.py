"""Everything a user can cause, as one small tree.

`QuorumError` is caught once, by the terminal and by the app, and shown as it reads: a message names what was found
and what to do about it. A wrong call from our own code raises `ValueError`; a broken invariant is an `assert`.

    QuorumError
    ├── EnvironmentProblem  the installation: llama-cpp-python missing or too old, no pip, no network
    ├── ModelFileError      a file that cannot be used: missing, truncated, not GGUF, unknown architecture
    ├── IncompatibleDrafter a drafter whose vocabulary is not the target's
    ├── MemoryShortage      weights, KV cache and buffers do not fit
    ├── PromptError         a prompt the model cannot take: empty, or longer than the context
    ├── PoolFull            more requests than may wait
    ├── PoolClosed          the set that would have answered is put away
    ├── SettingError        an option whose value makes no sense
    └── DecodeError         llama.cpp refused a pass
"""


class QuorumError(Exception):
    """Root of all errors that are shown to the user."""


class EnvironmentProblem(QuorumError):
    """The installation lacks something: a package, a function, a network."""


class ModelFileError(QuorumError):
    """A model file cannot be used; the message names the file and its fault."""


class IncompatibleDrafter(QuorumError):
    """A drafter does not share the target's vocabulary; the message names the rule and the token."""


class MemoryShortage(QuorumError):
    """Loading would need more memory than is free; the message gives both figures."""


class PromptError(QuorumError):
    """The prompt is empty or does not fit in the context; the message gives both lengths."""


class PoolFull(QuorumError):
    """As many requests wait as may; the message gives their number."""


class PoolClosed(QuorumError):
    """The set that would have answered a request is put away."""


class SettingError(QuorumError):
    """A setting has a value outside its range; the message names the setting and the range."""


class DecodeError(QuorumError):
    """llama.cpp refused a pass; the message gives its return code and last log line."""
