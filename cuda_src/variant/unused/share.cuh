#pragma once
// A block's share of some rows: it is number `block` of the `blocks` that clear them.
#include "ptx/base.cuh"

struct Share { i32 block, blocks; };
