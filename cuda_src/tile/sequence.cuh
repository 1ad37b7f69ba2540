#pragma once
// Where a sequence lies in a tensor. Each kind of tensor knows how to get there (tile/tma_tensor.cuh, tile/strided_tensor.cuh).
#include "ptx/base.cuh"

struct BatchEntry { i32 index; };       // in (batch, rows, heads, columns)
struct BatchSpan { i32 index, length; };  // the same, cut to the first rows of the entry
struct RowSpan { i32 first, length; };  // in (rows, heads, columns)
// Cuts what a sequence has of a tensor to its first rows, where its place says how many there are: tiles hold zeros behind them.
__device__ inline void cut(BatchEntry&, i32) {}
__device__ inline void cut(BatchSpan& at, i32 length) { at.length = length; }
__device__ inline void cut(RowSpan& at, i32 length) { at.length = length; }
// As masks and scores see a sequence: its lengths, and the numbers of its first rows in tensors of sequences end to end.
struct Extent { i32 q_len, kv_len, q_start, kv_start; };
struct Strides { i64 batch, row, head; };  // of a tensor like q or o, in elements; its last dimension is contiguous
