// What plain kernels share on the host: what describes their parameters and launches. Their threads take work
// with a stride, so that any grid is right.
#pragma once

#include <string>
#include <vector>

#include "halfbyte/kernels.hpp"

namespace halfbyte::cuda {

// Lines of "halfbyte_config.h": kThreads, of a block.
std::string plain_lines();
// All but op, kernel and config. Formulas: so many items of work, of which a block has `per_block` at a time.
KernelDescription plain_description(std::vector<KernelParameter> parameters, const std::string& items,
                                    int per_block);

KernelParameter number_parameter(const char* name, const char* type, const char* description);
// Pointers to `elements` of `type`.
KernelParameter read_parameter(const char* name, const char* type, std::string elements,
                               const char* description);
KernelParameter written_parameter(const char* name, const char* type, std::string elements,
                                  const char* description);
KernelParameter updated_parameter(const char* name, const char* type, std::string elements,
                                  const char* description);
// A pointer that is null where `needed` is false.
KernelParameter optional_parameter(KernelParameter parameter, bool needed);
KernelParameter counts_parameter();  // QuantizeCounts

// Of a matrix: rows, cols, group_size; its elements, groups and bytes of codes.
std::vector<KernelParameter> matrix_parameters(std::vector<KernelParameter> before);
inline constexpr const char* kMatrixElements = "rows * cols";
inline constexpr const char* kMatrixGroups = "rows * ((cols + group_size - 1) / group_size)";
std::string matrix_code_bytes(int bits);

// Of a tensor: its extents and those of its groups; its elements and groups.
std::vector<KernelParameter> tensor_parameters(std::vector<KernelParameter> before);
inline constexpr const char* kTensorElements = "outer * axis * inner";
inline constexpr const char* kTensorGroups =
    "outer / group_outer * ((axis + group_axis - 1) / group_axis) * (inner / group_inner)";

}  // namespace halfbyte::cuda
