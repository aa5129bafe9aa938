// How a kernel that copies units of a packed weight to shared memory lays them out there: shared by host and
// device, freestanding.
#pragma once

#include "formats/packed.h"

namespace halfbyte {

// A slot has a unit: its codes, and behind them its parameters. All sizes in bytes.
struct UnitSlot {
  int bits;
  int group;            // columns that share a scale; 0: a row
  int parameter_bytes;  // of the parameters of a row and group

  HALFBYTE_FN int code_bytes() const { return formats::kUnitRows * formats::kUnitCols * bits / 8; }
  HALFBYTE_FN int groups() const { return formats::unit_groups(group); }
  HALFBYTE_FN int group_bytes() const { return formats::kUnitRows * parameter_bytes; }
  HALFBYTE_FN int num_bytes() const { return code_bytes() + groups() * group_bytes(); }
  // Whether a unit and its parameters lie together in the packed weight, too.
  HALFBYTE_FN bool joint() const { return group != 0 && group <= formats::kUnitCols; }
  // Of the packed weight, where parameters are inlined: units of a block.
  HALFBYTE_FN int units_per_block() const {
    return formats::max(group, formats::kUnitCols) / formats::kUnitCols;
  }
};

}  // namespace halfbyte
