// Models that other tools have quantized in forms that are not read: they are recognised by their tensors and
// by what their configs say, named, and refused where they would have to be read.
#pragma once

#include "io/checkpoint.h"

namespace halfbyte::io {

// Fills in Impl::foreign and Weight::foreign; the weights of known layouts must have been found.
void find_foreign(Checkpoint::Impl& checkpoint);

// Error(bad_input) that names the first of Impl::foreign and says what to do, if there is one.
void refuse_foreign(const Checkpoint::Impl& checkpoint);

}  // namespace halfbyte::io
