"""Objects that are not put together as most are."""

from __future__ import annotations

from lowtide.objects.keys import fingerprint
from lowtide.objects.walk import content


class _Unnamed:
    """What its class says of its module is no text, as with types of some extensions."""


setattr(_Unnamed, "__module__", property(lambda _: "somewhere"))  # noqa: B010


def test_a_class_whose_module_is_no_text() -> None:
    assert not isinstance(_Unnamed.__module__, str)
    assert content(_Unnamed()) == content(_Unnamed())
    one = _Unnamed()
    assert fingerprint(one) == fingerprint(one)
