#pragma once
// A row of a page; page -1 for none.
#include "ptx/base.cuh"

struct Place { i32 page, row; };
