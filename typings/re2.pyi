"""What jlora uses of google-re2, which has no types of its own."""

class error(Exception): ...

class Options:
    log_errors: bool
    never_capture: bool
    max_mem: int

class _Match: ...

class _Regexp:
    def fullmatch(self, text: str) -> _Match | None: ...

class Set:
    @classmethod
    def FullMatchSet(cls, options: Options | None = None) -> Set: ...
    def Add(self, pattern: str) -> int: ...

def compile(pattern: str, options: Options | None = None) -> _Regexp: ...
