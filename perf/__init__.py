"""Tools that time, search, count, compare and prove; perf/README.md says which one answers which question."""
