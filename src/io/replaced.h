// What an output directory may take the place of.
#pragma once

#include <span>
#include <string>

namespace halfbyte::io {

// Error(exists), naming what was found, unless the directory is empty, or holds a checkpoint (an index, or
// one file of weights) and no files but these, which are regular files and no links: config.json, the index
// and the files that it names, `side_files` (relative paths) in their directories, files that many
// checkpoints have, by their names (docs/output.md), and temporary files. Error(io) where it cannot be read.
void check_replaceable(const std::string& directory, std::span<const std::string> side_files);

}  // namespace halfbyte::io
