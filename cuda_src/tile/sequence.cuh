#pragma once
// Where a sequence lies in a tensor. Each kind of tensor knows how to get there (tile/tensor.cuh, tile/raw_tensor.cuh).
#include "ptx/base.cuh"

struct BatchEntry { i32 index; };       // in (batch, rows, heads, columns)
struct RowSpan { i32 first, length; };  // in (rows, heads, columns)
