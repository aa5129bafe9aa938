// The files of an output: as those of the checkpoint that it is made from, with other tensors.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/output_weight.h"
#include "io/progress.h"
#include "io/safetensors.h"
#include "io/team.h"
#include "io/verify.h"

namespace halfbyte::io {

// Files of a model directory besides its tensors: relative paths.
struct SideFiles {
  std::vector<std::string> copied;   // without config.json and the index, which are rewritten
  std::vector<std::string> skipped;  // weights in other forms, hidden directories
};
// Error(bad_input) for links but InputFile::is_cache_link. Nothing for a checkpoint that is a single file.
SideFiles find_side_files(const Checkpoint::Impl& input);

// Error(usage) if the output is the input, or one is inside the other.
void check_output_path(const std::string& input, const std::string& output);

// Sets or replaces a key.
void set_metadata(Metadata& metadata, const std::string& key, const std::string& value);

// The files of an output with tensors. For each: which output weights go into it, and which files of the
// input these are made of, that of the first weight first; a file without weights is made of the one that it
// replaces.
struct OutputFiles {
  std::vector<std::string> names;
  std::vector<std::vector<size_t>> weights, sources;
  bool has_index = false;
};
// The files of the input, each with the weights whose first source it has; a file of which all tensors went
// elsewhere is left out. For shard_bytes > 0 as few as hold the weights in this order with at most so many
// bytes each, but for a weight that is larger. `num_bytes`: of each weight in the output. Error(usage) where
// shard_bytes is given for a single file.
OutputFiles output_files(const Checkpoint::Impl& input, std::span<const OutputWeight* const> weights,
                         std::span<const uint64_t> num_bytes, uint64_t shard_bytes);

// What a file of the output holds: offsets and sizes are not set.
struct FileContent {
  std::vector<StoredTensor> tensors;
  Metadata metadata;
};
// Error(bad_input), naming limit and value, where the output would be beyond what is read (io/limits.h).
void check_output(const Checkpoint::Impl& input, const OutputFiles& files,
                  const std::function<FileContent(size_t file)>& content);

// Bytes of the file.
uint64_t file_bytes(FileContent content);
// Of each file, which of `num_processes` writes it: the largest goes to the one with the least to do, and so
// on.
std::vector<int> deal_files(std::span<const uint64_t> num_bytes, int num_processes);
// Threads that reserve files of so many bytes: memory file systems fill the space with zeros, 4 to 7 GB/s by
// a thread.
int reserving_threads(uint64_t num_bytes, int num_threads);

class Journal;

// What a run does with what an earlier one left unfinished.
struct Resumption {
  Unfinished unfinished = Unfinished::keep;
  const nlohmann::json& identity;  // what both have in common, but for the input; null: there is no journal
  int num_threads = 0;             // of checking files
};

// A file of the output with tensors, while it is written.
class TensorFile {
 public:
  // One of OutputFile::unnamed, to measure with.
  static std::unique_ptr<TensorFile> unnamed(const std::string& directory, FileContent content);
  const StoredTensor& tensor(const std::string& name) const { return *by_name_.at(name); }
  // Thread safe for disjoint ranges.
  void write(const StoredTensor& tensor, uint64_t offset, std::span<const std::byte> bytes);
  // One run behind the other. A tensor of short runs is put together in memory, and written when all of it
  // has come, each byte once: of 1 Mi codes, awq has 4096 runs of 128 bytes.
  void write(const StoredTensor& tensor, const StoredRange& range, std::span<const std::byte> bytes);
  // As often as it fits into the tensor.
  void write_repeated(const StoredTensor& tensor, std::string_view content);
  // To read back.
  const std::string& path() const { return file_->temporary_path(); }
  void sync(const std::function<void()>& poll);

 private:
  friend class OutputCheckpoint;
  // `make(num_bytes)`: the file, which gets its header.
  template <class Make>
  TensorFile(size_t index, FileContent&& content, const Make& make);

  size_t index_;
  std::vector<StoredTensor> tensors_;
  struct Assembly {
    std::unique_ptr<std::byte[]> bytes;
    uint64_t missing = 0;
  };

  std::unordered_map<std::string_view, const StoredTensor*> by_name_;
  std::unique_ptr<OutputFile> file_;
  std::mutex mutex_;
  std::unordered_map<const StoredTensor*, Assembly> assemblies_;
};

class OutputCheckpoint {
 public:
  // Checks the output path and makes what keeps the output invisible until it is complete, or takes over what
  // an earlier run left unfinished. Of a team, the process that leads does, and the others join. `files`,
  // `side_files`, `reporter` and `team` must outlive it.
  OutputCheckpoint(const Checkpoint::Impl& input, const std::string& output, bool force,
                   const OutputFiles& files, const SideFiles& side_files, ProgressReporter& reporter,
                   const Resumption& resumption, Team& team);
  ~OutputCheckpoint();

  // Within run(): whether an earlier run has completed the file; and whether it has these tensors, and so
  // takes part in the output as it is.
  bool is_resumed(size_t file) const { return !resumed_.empty() && resumed_[file] != 0; }
  bool take_resumed(size_t file, const FileContent& content);
  // Whether this process writes the file. Of a team, each has about as many bytes to write: known after
  // reserve().
  bool is_mine(size_t file) const { return owner_.empty() ? team_.leads() : owner_[file] == team_.rank(); }
  // When the files of this process are written: what leads gets the records of those that the others have
  // written.
  void gather_files();
  bool is_gathered(size_t file) const { return !gathered_.empty() && gathered_[file] != 0; }

  // What was said of the weights of a file that is resumed or gathered.
  nlohmann::json records_of(size_t file) const;
  // What a run has found out that another one need not, under a name that no file has; null: nothing.
  nlohmann::json find_record(const std::string& name) const;
  void add_record(const std::string& name, nlohmann::json&& record);

  // Runs what is left of the run, finish() included. Where it fails, files that are complete stay unfinished,
  // and the message says so, unless another run would fail likewise.
  void run(const std::function<void()>& work);

  // Reserves the space of all files, so that want of it shows before the work. `content(file)` is what it is
  // going to hold, as far as is known; a file that turns out larger needs more when it is begun.
  template <class Content>
  void reserve(const Content& content) {
    if (!directory_) return;  // begin_file() does it
    std::vector<uint64_t> planned(files_.names.size());
    for (size_t file = 0; file < files_.names.size(); ++file) {
      if (is_resumed(file)) continue;
      planned[file] = file_bytes(content(file));
      reporter_.poll();
    }
    deal(planned);
    if (team_.leads()) reserve_bytes(planned);
  }
  // Begins file `index` of the output: reserves its space, writes its header. It is forgotten if it is not
  // committed, and must be before it is begun again. Files may be written and completed side by side, as long
  // as one is completed at a time.
  std::unique_ptr<TensorFile> begin_file(size_t index, FileContent content);
  // Between steps without progress: Error(cancelled) where that is asked for.
  void poll() { reporter_.poll(); }
  // Reads files back, as verify_files. `items`: of each.
  void verify(std::span<const TensorFile* const> files, std::vector<std::vector<VerifyItem>> items,
              int num_threads, ProgressPhase& progress) const;
  void sync(TensorFile& file);
  // The files that it is made of must not have changed. `records`: of its weights, taken for a run that
  // resumes, if there is something to say of them.
  void commit_file(std::unique_ptr<TensorFile> file, nlohmann::json* records = nullptr);

  // Copies the side files, writes index, `texts` (names of files and what they hold) and config (where not
  // empty), makes the output visible. The last step of a run that can fail: memory for what follows is taken
  // before, so that a run that fails has no output. Of a team, the process that leads does it, and the others
  // wait.
  void finish(const std::string& config, const std::map<std::string, std::string>& texts = {});

 private:
  std::unique_ptr<LockedDirectory> take_unfinished();
  void begin_journal();
  void join_team();
  void check_resumed();
  void share_resumed();
  void deal(std::span<const uint64_t> num_bytes);
  [[noreturn]] void give_up(const Error& error);
  void count_tensors(size_t file, std::span<const StoredTensor> tensors);
  // Of each file; 0: it is complete.
  void reserve_bytes(std::span<const uint64_t> num_bytes);
  void check_sources(size_t file) const;
  void finish_alone(const std::string& config, const std::map<std::string, std::string>& texts);
  InputFile open_side_file(const std::string& name) const;
  void write_text(const std::string& name, const std::string& text);
  void copy_file(const std::string& name, ProgressPhase& progress);
  std::string index_text() const;

  const Checkpoint::Impl& input_;
  std::string output_;
  bool force_;
  const OutputFiles& files_;
  const SideFiles& side_files_;
  ProgressReporter& reporter_;
  uint64_t side_bytes_ = 0;                     // of side_files_
  std::unique_ptr<OutputDirectory> directory_;  // null for a single file
  std::unique_ptr<nlohmann::json> identity_;    // null: there is no journal
  int num_threads_;
  Team& team_;
  std::unique_ptr<Journal> journal_;      // of this process, from the first record on
  std::unique_ptr<Journal> earlier_;      // of a process that does not lead: what earlier runs have recorded
  std::vector<int> owner_;                // by file: the rank that writes it; empty: the one that leads
  std::vector<char> resumed_, gathered_;  // by file
  std::unique_ptr<TensorFile> single_;    // where there is no directory, the one that finish() makes visible
  std::mutex mutex_;                      // of what follows
  std::map<std::string, std::string> weight_map_;  // of the committed files
  uint64_t total_bytes_ = 0;
};

// A tensor that is copied unchanged, in tasks of this size.
inline constexpr int64_t kCopyBytes = int64_t{4} << 20;

}  // namespace halfbyte::io
