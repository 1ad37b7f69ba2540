#pragma once
// Results of several attentions, arrays of their own.
#include "tile/sequence.cuh"

struct Part {
    const void* o;    // (batch, rows, heads, columns) of Element, or of Number
    const void* lse;  // (batch, heads, rows) of Number
    Strides o_strides, lse_strides;
};
struct PartList { Part part[16]; };
