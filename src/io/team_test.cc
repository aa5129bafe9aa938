// Processes that write one output together: here the threads of a group.
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/output.hpp"
#include "io/test_directory.h"

namespace halfbyte {
namespace {

namespace fs = std::filesystem;

// What a group of threads shares.
struct Meeting {
  explicit Meeting(int size) : size(size), words(static_cast<size_t>(size)) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> words, result;
  int arrived = 0;
  int64_t number = 0;
  std::atomic<int> failed = -1;
};

class ThreadGroup : public ProcessGroup {
 public:
  ThreadGroup(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return meeting_->size; }
  std::vector<std::string> gather(const std::string& own) override {
    std::unique_lock lock(meeting_->mutex);
    meeting_->words[static_cast<size_t>(rank_)] = own;
    if (++meeting_->arrived == meeting_->size) {
      meeting_->result = meeting_->words;
      meeting_->arrived = 0;
      ++meeting_->number;
      meeting_->changed.notify_all();
      return meeting_->result;
    }
    const int64_t number = meeting_->number;
    meeting_->changed.wait(lock, [&] { return meeting_->number != number; });
    return meeting_->result;
  }
  void tell_failure() override { meeting_->failed = rank_; }
  bool others_failed() override { return meeting_->failed >= 0 && meeting_->failed != rank_; }

 private:
  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
};

class ProcessGroupTest : public ::testing::Test {
 protected:
  static constexpr int kFiles = 7;

  std::string path(const std::string& name) const { return dir_ / name; }
  // Files of sizes that differ.
  std::string make_model() {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0, 0.02f);
    WriterOptions options;
    options.shard_bytes = 1;
    options.config = R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"})";
    CheckpointWriter writer(path("model"), options);
    for (int layer = 0; layer < kFiles; ++layer) {
      Tensor x({}, DType::f32, {64 * (1 + layer % 3), 128});
      auto* const values = reinterpret_cast<float*>(x.data());
      for (int64_t i = 0; i < x.num_elements(); ++i) values[i] = normal(rng);
      writer.set("model.layers." + std::to_string(layer) + ".mlp.up_proj.weight", std::move(x));
    }
    writer.finish();
    write_file(path("model/tokenizer.json"), "{}");
    return path("model");
  }
  std::map<std::string, std::string> content(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(path(name)))
      files[entry.path().filename().string()] = read_file(entry.path().string());
    return files;
  }

  // Runs `work` as each of `size` processes; what each throws, "" where it ends well.
  template <class Work>
  static std::vector<std::string> run(int size, const Work& work) {
    const auto meeting = std::make_shared<Meeting>(size);
    std::vector<std::string> errors(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        try {
          work(std::make_shared<ThreadGroup>(meeting, rank));
        } catch (const Error& error) {
          errors[static_cast<size_t>(rank)] = std::string(to_string(error.code())) + " " + error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  static void expect_none(const std::vector<std::string>& errors) {
    EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
  }

  TestDirectory dir_;
};

QuantizeOptions team_options(Format format, std::shared_ptr<ProcessGroup> group = nullptr) {
  QuantizeOptions options;
  options.format = format;
  options.num_threads = 1;
  options.process_group = std::move(group);
  return options;
}

TEST_F(ProcessGroupTest, a_dry_run_estimates_the_slowest) {
  const std::string model = make_model();
  for (const int size : {2, 10}) {  // more than files
    std::vector<double> totals(static_cast<size_t>(size));
    expect_none(run(size, [&](auto group) {
      QuantizeOptions options = team_options(Format::nvfp4, group);
      options.dry_run = true;
      totals[static_cast<size_t>(group->rank())] =
          quantize_checkpoint(model, path("out"), options).total_seconds;
    }));
    EXPECT_GT(totals.front(), 0);
    EXPECT_EQ(totals, std::vector<double>(totals.size(), totals.front())) << "all say the same";
    EXPECT_FALSE(fs::exists(path("out")));
  }
}

TEST_F(ProcessGroupTest, the_bytes_and_the_report_of_one_process) {
  const std::string model = make_model();
  for (const Format format : {Format::nf4, Format::nvfp4}) {  // nvfp4 shares ranges
    const CheckpointReport want = quantize_checkpoint(model, path("want"), team_options(format));
    dequantize_checkpoint(path("want"), path("dense"), {});
    for (const int size : {2, 3, 10}) {  // more than files
      expect_none(run(size, [&](auto group) {
        const CheckpointReport report = quantize_checkpoint(model, path("out"), team_options(format, group));
        if (group->rank() != 0) return;
        EXPECT_EQ(report.num_resumed_files, 0);
        ASSERT_EQ(report.weights.size(), want.weights.size());
        for (size_t i = 0; i < want.weights.size(); ++i) {
          EXPECT_EQ(report.weights[i].relative_rmse, want.weights[i].relative_rmse);
          EXPECT_TRUE(report.weights[i].measured);
        }
      }));
      EXPECT_EQ(content("out"), content("want"));
      expect_none(run(size, [&](auto group) {
        DequantizeOptions options;
        options.num_threads = 1;
        options.process_group = group;
        dequantize_checkpoint(path("out"), path("out-dense"), options);
      }));
      EXPECT_EQ(content("out-dense"), content("dense"));
      fs::remove_all(path("out"));
      fs::remove_all(path("out-dense"));
    }
    fs::remove_all(path("want"));
    fs::remove_all(path("dense"));
  }
  EXPECT_EQ(dir_.names(), std::vector<std::string>{"model"});
}

TEST_F(ProcessGroupTest, of_one_file_rank_0_does_it_all) {
  const std::string model = make_model();
  QuantizeOptions whole = team_options(Format::nf4);
  whole.shard_bytes = uint64_t{1} << 40;
  quantize_checkpoint(model, path("want"), whole);
  expect_none(run(3, [&](auto group) {
    QuantizeOptions options = whole;
    options.process_group = group;
    quantize_checkpoint(model, path("out"), options);
    quantize_checkpoint(model + "/model-00003-of-00007.safetensors", path("out.safetensors"),
                        team_options(Format::nf4, group));
  }));
  EXPECT_EQ(content("out"), content("want"));
  EXPECT_TRUE(fs::exists(path("out.safetensors")));
}

// All throw the error of the first, and a run with another number of processes goes on.
TEST_F(ProcessGroupTest, all_fail_and_others_resume) {
  const std::string model = make_model();
  quantize_checkpoint(model, path("want"), team_options(Format::nvfp4));
  for (int failing = 0; failing < 3; ++failing)
    for (const int size : {1, 2, 4}) {
      const auto errors = run(3, [&](auto group) {
        QuantizeOptions options = team_options(Format::nvfp4, group);
        int syncs = 0;
        options.progress = [&](const Progress& progress) {
          syncs += progress.phase == std::string("sync");
          return group->rank() != failing || syncs < 2;
        };
        quantize_checkpoint(model, path("out"), options);
      });
      for (const std::string& error : errors)
        EXPECT_EQ(error.find("CANCELLED sync was cancelled"), 0u) << error;
      EXPECT_NE(errors.front().find(" of 7 files are complete and kept"), std::string::npos)
          << errors.front();
      EXPECT_FALSE(fs::exists(path("out")));
      expect_none(run(size, [&](auto group) {
        QuantizeOptions options = team_options(Format::nvfp4, group);
        options.unfinished = Unfinished::resume;
        const CheckpointReport report = quantize_checkpoint(model, path("out"), options);
        EXPECT_GE(report.num_resumed_files, 1);
      }));
      EXPECT_EQ(content("out"), content("want"));
      EXPECT_EQ(dir_.names(), (std::vector<std::string>{"model", "out", "want"}));
      fs::remove_all(path("out"));
    }
}

TEST_F(ProcessGroupTest, errors_before_the_work) {
  const std::string model = make_model();
  fs::create_directory(path("there"));
  for (const auto& [input, output, text] : {std::tuple(model, path("there"), "EXISTS output"),
                                            std::tuple(path("nothing"), path("out"), "IO cannot")}) {
    const auto errors = run(3, [&, input = input, output = output](auto group) {
      quantize_checkpoint(input, output, team_options(Format::nf4, group));
    });
    for (const std::string& error : errors) EXPECT_EQ(error.find(text), 0u) << error;
  }
  // Of one process alone.
  const auto errors = run(3, [&](auto group) {
    QuantizeOptions options = team_options(Format::nf4, group);
    if (group->rank() == 1) options.group_size = 3;
    quantize_checkpoint(model, path("out"), options);
  });
  for (const std::string& error : errors) EXPECT_EQ(error.find("USAGE"), 0u) << error;
  EXPECT_EQ(dir_.names(), (std::vector<std::string>{"model", "there"}));
}

}  // namespace
}  // namespace halfbyte
