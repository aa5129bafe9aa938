// The weights that runtimes multiply by as one: those of nvfp4 share their global scale.
#pragma once

#include <string>
#include <string_view>

namespace halfbyte::io {

// The same for the weights of one product, other weights have a name of their own:
// "model.layers.0.mlp.gate_proj.weight" for that of up_proj too. Source: the packed modules of vLLM.
std::string fused_name(std::string_view weight);

}  // namespace halfbyte::io
