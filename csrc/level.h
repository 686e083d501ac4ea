// What every level provides: the two calls of ringattn_cpu.h, compiled for one instruction set.
#pragma once

#include "ringattn_cpu.h"

#define RA_DECLARE_LEVEL(level)                                                                                        \
    namespace ringattn::level {                                                                                        \
    int forward(const ra_args &args);                                                                                  \
    int backward(const ra_args &args);                                                                                 \
    }
