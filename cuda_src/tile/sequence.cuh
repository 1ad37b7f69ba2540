#pragma once
// Where a sequence lies in a tensor. Each kind of tensor knows how to get there (tile/tma_tensor.cuh, tile/strided_tensor.cuh).
#include "ptx/base.cuh"

struct BatchEntry { i32 index; };       // in (batch, rows, heads, columns)
struct RowSpan { i32 first, length; };  // in (rows, heads, columns)
struct Strides { i64 batch, row, head; };  // of a tensor like q or o, in elements; its last dimension is contiguous
