#pragma once
// Where a sequence lies in a tensor: which tensors there are, tile/mapped.cuh and tile/strided.cuh know.
#include "ptx/base.cuh"

struct BatchEntry { i32 index; };         // of (batch, rows, heads, columns)
struct RowSpan { i32 first, length; };    // of (rows, heads, columns)
