// Runs a target without libFuzzer: the corpus, then random changes of it until the time is over.
//
//   fuzz_NAME SECONDS SEED ARTIFACT DICTIONARY CORPUS...
//
// An input that crashes, takes more than 2 s of the processor, or memory beyond 64 MiB and 8 times its size,
// is written to ARTIFACT. The last line says how many inputs there were. No coverage guides it:
// scripts/campaign.sh without
// --quick takes libFuzzer, where clang can be had.
#include <fcntl.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <vector>

#include "fuzz.h"

extern "C" size_t malloc_usable_size(void* memory) noexcept;  // of glibc

namespace {

constexpr size_t kMostBytes = size_t{1} << 20;
constexpr long kMostSeconds = 2;
constexpr int64_t kFreeBytes = int64_t{64} << 20;
constexpr int64_t kBytesPerByte = 8;

// Memory of operator new, now and at most.
std::atomic<int64_t> now_bytes = 0, most_bytes = 0;

void count(int64_t num_bytes) {
  const int64_t now = now_bytes += num_bytes;
  if (now > most_bytes) most_bytes = now;
}

const uint8_t* input = nullptr;
size_t input_bytes = 0;
const char* artifact = nullptr;

// In a signal handler: system calls only.
void save(int signal) {
  const int fd = ::open(artifact, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd >= 0 && ::write(fd, input, input_bytes) >= 0) ::close(fd);
  static constexpr char kHang[] = "FINDING: hangs for 2 s\n", kCrash[] = "FINDING: crashes\n";
  const bool hangs = signal == SIGPROF;
  if (::write(STDERR_FILENO, hangs ? kHang : kCrash, hangs ? sizeof kHang - 1 : sizeof kCrash - 1) < 0)
    ::_exit(76);
  ::_exit(77);
}

void install() {
  static std::vector<char> stack(64 * 1024);
  stack_t own = {};
  own.ss_sp = stack.data();
  own.ss_size = stack.size();
  ::sigaltstack(&own, nullptr);
  struct sigaction action = {};
  action.sa_handler = save;
  action.sa_flags = SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGPROF})
    ::sigaction(signal, &action, nullptr);
}

void run(const std::string& text) {
  input = reinterpret_cast<const uint8_t*>(text.data());
  input_bytes = text.size();
  itimerval timer = {};
  timer.it_value.tv_sec = kMostSeconds;
  ::setitimer(ITIMER_PROF, &timer, nullptr);
  const int64_t before = now_bytes;
  most_bytes = before;
  // Of its own size, so that a read beyond it shows in a build with sanitizers.
  const std::vector<uint8_t> exact(text.begin(), text.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  if (most_bytes - before > kFreeBytes + kBytesPerByte * static_cast<int64_t>(text.size()))
    halfbyte::fuzz::fail("takes more than 64 MiB and 8 times the input");
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The words between quotes, with \xNN as libFuzzer has it.
std::vector<std::string> words_of(const std::string& dictionary) {
  std::vector<std::string> words;
  for (size_t at = 0; (at = dictionary.find('"', at)) != std::string::npos;) {
    std::string word;
    for (++at; at < dictionary.size() && dictionary[at] != '"'; ++at) {
      if (dictionary[at] == '\\' && dictionary.compare(at, 2, "\\x") == 0) {
        word += static_cast<char>(std::stoi(dictionary.substr(at + 2, 2), nullptr, 16));
        at += 3;
      } else {
        if (dictionary[at] == '\\') ++at;
        word += dictionary[at];
      }
    }
    ++at;
    words.push_back(word);
  }
  return words;
}

class Mutator {
 public:
  Mutator(uint64_t seed, std::vector<std::string> corpus, std::vector<std::string> words)
      : random_(seed), corpus_(std::move(corpus)), words_(std::move(words)) {}

  std::string next() {
    std::string text = corpus_[below(corpus_.size())];
    for (size_t i = 0, n = 1 + below(6); i < n; ++i) change(text);
    if (text.size() > kMostBytes) text.resize(kMostBytes);
    return text;
  }

 private:
  size_t below(size_t end) { return end == 0 ? 0 : random_() % end; }

  void change(std::string& text) {
    const size_t at = below(text.size() + 1);
    const size_t length = std::min(text.size() - at, size_t{1} + below(size_t{1} << below(8)));
    switch (below(9)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(at, length));
        break;
      case 4:
        text.insert(below(text.size() + 1), text.substr(at, length));
        break;
      case 5: {
        const std::string& other = corpus_[below(corpus_.size())];
        const size_t from = below(other.size() + 1);
        text.replace(at, length, other, from, 1 + below(64));
        break;
      }
      case 6:
        text.insert(at, words_[below(words_.size())]);
        break;
      case 7:
        text.replace(at, length, words_[below(words_.size())]);
        break;
      default:
        change_number(text, at);
    }
  }
  void change_number(std::string& text, size_t at) {
    static constexpr const char* kNumbers[] = {"0",
                                               "1",
                                               "2",
                                               "3",
                                               "4",
                                               "8",
                                               "31",
                                               "32",
                                               "64",
                                               "127",
                                               "128",
                                               "255",
                                               "256",
                                               "4294967296",
                                               "9223372036854775807",
                                               "9223372036854775808",
                                               "18446744073709551615",
                                               "-1",
                                               "1.5",
                                               "1e9",
                                               "1e400"};
    constexpr const char* kDigits = "0123456789";
    const size_t begin = text.find_first_of(kDigits, at);
    if (begin == std::string::npos) return;
    const size_t end = std::min(text.find_first_not_of(kDigits, begin), text.size());
    text.replace(begin, end - begin, kNumbers[below(std::size(kNumbers))]);
  }

  std::mt19937_64 random_;
  std::vector<std::string> corpus_, words_;
};

}  // namespace

void* operator new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  count(static_cast<int64_t>(::malloc_usable_size(memory)));
  return memory;
}
void* operator new(size_t size, std::align_val_t alignment) {
  void* memory = nullptr;
  if (::posix_memalign(&memory, static_cast<size_t>(alignment), size) != 0) throw std::bad_alloc();
  count(static_cast<int64_t>(::malloc_usable_size(memory)));
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) count(-static_cast<int64_t>(::malloc_usable_size(memory)));
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::stod(argv[1]));
  artifact = argv[3];
  std::vector<std::string> corpus;
  for (int i = 5; i < argc; ++i) {
    if (!std::filesystem::is_directory(argv[i])) {
      corpus.push_back(read(argv[i]));
      continue;
    }
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
    std::ranges::sort(files);
    for (const auto& file : files) corpus.push_back(read(file));
  }
  install();
  run("");  // what is made once
  uint64_t executions = 0;
  for (const std::string& text : corpus) run(text), ++executions;
  Mutator mutator(std::stoull(argv[2]), corpus, words_of(read(argv[4])));
  while (!corpus.empty() && std::chrono::steady_clock::now() < end) run(mutator.next()), ++executions;
  std::printf("executions %llu\n", static_cast<unsigned long long>(executions));
}
