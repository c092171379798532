"""`deprecated`: `typing_extensions.deprecated` for type checkers, and torch's own message at run time.

torch's decorator gives a class a `__new__`, which would break compiled graphs, and messages differ between releases.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import TYPE_CHECKING, Any

from castwise._torch_private import only_inlined
from castwise._warnings import warn

if TYPE_CHECKING:
    from typing_extensions import deprecated as deprecated
else:

    def deprecated(hint: str, *, category: type[Warning]) -> Any:
        """Warn with the message of torch's name at the same path, then with a hint, wherever torch's name warns.

        A class warns when an instance is created, but not for classes derived from it: torch's class, from which it
        must be derived itself, warns when these are defined.
        """

        def decorate(old: Any) -> Any:
            torchs = sys.modules["torch" + old.__module__.removeprefix("castwise")]
            message = getattr(operator.attrgetter(old.__qualname__)(torchs), "__deprecated__", "")
            is_class = isinstance(old, type)
            function, module = old.__init__ if is_class else old, old.__module__
            text = f"{message} With castwise, {hint}."

            @only_inlined
            @functools.wraps(function)
            def warning(*args: Any, **kwargs: Any) -> Any:
                if not is_class or type(args[0]).__module__ == module:
                    warn(text, category)
                return function(*args, **kwargs)

            old.__deprecated__ = warning.__deprecated__ = message
            if is_class:
                old.__init__ = warning
            return old if is_class else warning

        return decorate
