"""Sizes of launches, for the host: Triton's functions of these names serve kernels, too, and take microseconds here."""


def cdiv(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, which is 1 at least."""
    return 1 << (count - 1).bit_length()
