#pragma once
// Pairs of one query: its position, that of the first key, and how many keys there are from that on; none where the query is none.
#include "ptx/base.cuh"

struct PairRow { i32 q, first, count; };
