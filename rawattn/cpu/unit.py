"""The columns of a unit of work, a row of integers: some rows of a query tile, and their keys."""

BATCH, ROW, QUERIES = 0, 1, 2  # of q and what lies as it does: its number in the batch, its first row, how many there are
PAGE, KEY, KEYS, KV_HEAD = 3, 4, 5, 6  # of k and v: their first page or number in the batch, the first row, how many there are
BOUNDS = 7  # where the first and last keys of its rows are in the arrays of these
SEQUENCE, HEAD, QUERY, POSITION = 8, 9, 10, 11  # for dropout: numbers of the sequence, of its first head, query and key
BEFORE, BEHIND = 12, 13  # rows beside those of the unit, whose gradients it makes 0
FIELDS = 14
