"""Imported by the fork server behind all others: from here on there is garbage to collect again."""

import gc

gc.freeze()  # of what was imported there is none
gc.enable()
