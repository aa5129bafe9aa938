#include "io/replaced.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <string_view>

#include "core/checks.h"
#include "core/directory.h"
#include "core/temporary.h"
#include "io/file.h"
#include "io/shard_index.h"

namespace halfbyte::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWeights = ".safetensors";

// What checkpoints have besides their weights: written by transformers, tokenizers, PEFT, quantization tools
// and model hubs. docs/output.md has this list.
constexpr std::string_view kKnownFiles[] = {
    ".gitattributes",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
    "USE_POLICY.md",
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "quant_config.json",
    "quantize_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
};

[[noreturn]] void refuse(const std::string& directory, const std::string& what) {
  HALFBYTE_FAIL(exists,
                "output directory \"{}\" is not replaced: {} (only a checkpoint is, with nothing else in it)",
                printable(directory), what);
}

struct Listing {
  const std::string& directory;
  std::set<std::string, std::less<>> weights;  // files
  std::span<const std::string> side_files;

  bool may_hold(const std::string& path) const {
    return path == kIndexFile || weights.contains(path) ||
           std::ranges::find(kKnownFiles, path) != std::end(kKnownFiles) ||
           std::ranges::find(side_files, path) != side_files.end() ||
           is_temporary_name(path.substr(path.rfind('/') + 1));
  }
  bool has_side_files_in(const std::string& prefix) const {
    return std::ranges::any_of(side_files, [&](const std::string& path) { return path.starts_with(prefix); });
  }
};

// `prefix` is the relative path of the directory, with a slash at its end.
void check_entries(const Listing& listing, const std::string& prefix) {
  for (const std::string& name : list_directory(join(listing.directory, prefix))) {
    const std::string path = prefix + name, entry = join(listing.directory, path);
    std::error_code error;
    const fs::file_status status = fs::symlink_status(entry, error);
    HALFBYTE_CHECK(!error, io, "cannot stat \"{}\": {}", printable(entry), error.message());
    if (fs::is_directory(status)) {
      if (!listing.has_side_files_in(path + "/"))
        refuse(listing.directory, fmt::format("it holds the directory \"{}\"", printable(path)));
      check_entries(listing, path + "/");
    } else if (!fs::is_regular_file(status)) {
      refuse(listing.directory, fmt::format("\"{}\" in it is not a regular file", printable(path)));
    } else if (!listing.may_hold(path)) {
      refuse(listing.directory, fmt::format("it holds \"{}\"", printable(path)));
    }
  }
}

// The files that the index names.
std::set<std::string, std::less<>> indexed_files(const std::string& directory) {
  std::set<std::string, std::less<>> files;
  try {
    const std::string text = read_text(InputFile::open_beneath(directory, kIndexFile), kMaxIndexBytes);
    for (std::string& file : parse_shard_index(text).files) files.insert(std::move(file));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::bad_input) throw;
    refuse(directory, fmt::format("its index is none: {}", error.what()));
  }
  return files;
}

}  // namespace

void check_replaceable(const std::string& directory, std::span<const std::string> side_files) {
  Listing listing{directory, {}, side_files};
  const std::vector<std::string> names = list_directory(directory);
  if (names.empty()) return;
  const bool has_index = std::ranges::binary_search(names, kIndexFile);
  for (const std::string& name : names)
    if (name.ends_with(kWeights)) listing.weights.insert(name);
  if (has_index)
    listing.weights = indexed_files(directory);
  else if (listing.weights.empty())
    refuse(directory, fmt::format("it holds \"{}\" and no checkpoint", printable(names.front())));
  else if (listing.weights.size() > 1)
    refuse(directory,
           fmt::format("it has {} {} files and no {}", listing.weights.size(), kWeights, kIndexFile));
  check_entries(listing, "");
}

}  // namespace halfbyte::io
