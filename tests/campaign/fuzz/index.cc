// The index of a model of several files. What is read is written again, and must be the same.
#include <algorithm>

#include "fuzz.h"
#include "io/shard_index.h"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::attempt([&] {
    const io::ShardIndex index = io::parse_shard_index(fuzz::text_of(data, size));
    std::vector<std::pair<std::string_view, std::string_view>> files;
    for (const auto& entry : index.entries) files.emplace_back(index.name(entry), index.files.at(entry.file));
    std::ranges::sort(files);
    const std::string text = io::shard_index_text(index.rest, size, files);
    const io::ShardIndex again = io::parse_shard_index(text);
    if (again.entries.size() != files.size()) fuzz::fail("an index lost a tensor");
    for (size_t i = 0; i < files.size(); ++i)
      if (again.name(again.entries[i]) != files[i].first ||
          again.files[again.entries[i].file] != files[i].second)
        fuzz::fail("an index is not what was written");
  });
  return 0;
}
