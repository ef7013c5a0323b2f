"""How big the package is; not shipped. `python -m whalepod.tools.size` is part of `make check`."""
