#pragma once
// This is what the device found that the host had not allowed: bits of args.violations, which stay until the host clears them. What is
// wrong is left out.
#include "ptx/base.cuh"

namespace violated {
constexpr u32 kv_len = 1, q_len = 2, page = 4, position = 8, slot = 16, kv_begin = 32, torn = 64, cu_seqlens = 128, keys = 256;
}
