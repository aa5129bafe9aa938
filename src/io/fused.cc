#include "io/fused.h"

#include <array>

namespace halfbyte::io {
namespace {

// Modules, each under the name of the first one.
constexpr std::array<std::string_view, 2> kFused[] = {
    {"q_proj", "k_proj"},
    {"q_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},                       // experts of Mixtral
    {"q_a_proj", "kv_a_proj_with_mqa"}  // latent attention of DeepSeek
};

}  // namespace

std::string fused_name(std::string_view weight) {
  for (const auto& [first, other] : kFused) {
    const std::string part = "." + std::string(other) + ".";
    const size_t at = weight.rfind(part);
    if (at == std::string_view::npos) continue;
    std::string name(weight);
    return name.replace(at + 1, other.size(), first);
  }
  return std::string(weight);
}

}  // namespace halfbyte::io
