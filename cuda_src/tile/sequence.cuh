#pragma once
// Where a sequence lies in a tensor. Each kind of tensor knows how to get there (tile/tma_tensor.cuh, tile/strided_tensor.cuh).
#include "ptx/base.cuh"

struct BatchEntry { i32 index; };       // in (batch, rows, heads, columns)
struct BatchSpan { i32 index, length; };  // the same, cut to the first rows of the entry
struct RowSpan { i32 first, length; };  // in (rows, heads, columns)
// As masks and scores see a sequence: its lengths, and the numbers of its first rows in tensors of sequences end to end.
struct Extent { i32 q_len, kv_len, q_start, kv_start; };
struct Strides { i64 batch, row, head; };  // of a tensor like q or o, in elements; its last dimension is contiguous
