"""Where groups of rows lie, read from offs on the device, inside the buffer whatever the tensor holds.

The host cannot look at offs without a stop, so a kernel trusts no number there: bounds are clamped to the rows
that the buffer has. Of ends that are too large, negative or out of order results are unspecified, but nothing is read
or written outside.

    ends 64, 32, 500 in a buffer of 128 rows:  groups 0 to 64, 64 to 32 (no rows), 32 to 128;  128 valid rows
"""

import triton
import triton.language as tl


@triton.jit
def valid_rows(ends_ptr, groups, rows):
    """The end of the last group, at most `rows`; below 0 it means no rows, too. `rows` if ends_ptr is None."""
    if ends_ptr is None:
        return rows
    else:
        return tl.minimum(tl.load(ends_ptr + groups - 1), rows)


@triton.jit
def bounds_of(group, ends_ptr, groups, rows):
    """(start, end), 0 to `rows`, of each of `group` (a tensor); start > end where ends are out of order."""
    end = tl.load(ends_ptr + group, mask=group < groups, other=0)
    start = tl.load(ends_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
    return tl.maximum(tl.minimum(start, rows), 0), tl.maximum(tl.minimum(end, rows), 0)
