// The ranges of percentile and mse observers: after those of the finite values, from the same batch.
#pragma once

#include "ops/observe/observe.h"
#include "ops/observe/range_search_args.h"

namespace halfbyte {

formats::MseCodes mse_codes(const QParamsConfig& config);

// Whether the ranges of the finite values are not yet those of the observer: percentile and mse, but for
// groups so short that the percentile is their minimum and maximum.
bool needs_search(const ObserveProblem& problem);

// `seen`: num_scales Seen<F>, the ranges of the finite values; they become those of the observer. A group
// without any stays as it is.
void search_ranges_cpu(const ObserveProblem& problem, const void* x, void* seen);

}  // namespace halfbyte
