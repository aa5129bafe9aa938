// The plans of a product by the number of rows.
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "core/expect.h"
#include "core/tensor_check.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {

struct QgemmPlans::Plans {
  const QgemmPlan empty;  // of m = 0: it has checked what does not depend on m
  const PlanPreference preference;

  // Those that are kept for good: `small` points into `owned`, which only grows, once they are there.
  std::array<std::atomic<const QgemmPlan*>, kSmall + 1> small = {};
  std::mutex mutex;  // of what follows; not held while a plan is selected
  std::deque<QgemmPlan> owned;
  std::vector<QgemmPlan> others;  // the one that was used last is the last

  Plans(Device device, const QgemmDescriptor& descriptor, const PlanPreference& of)
      : empty(QgemmPlan::select(device, descriptor, of)), preference(of) {}

  QgemmPlan select(int64_t m) const {
    QgemmDescriptor descriptor = empty.descriptor();
    descriptor.m = m;
    return QgemmPlan::select(empty.device(), descriptor, preference);
  }

  // Of threads that select the same plan at a time, the first gives it to all.
  QgemmPlan small_at(int64_t m) {
    std::atomic<const QgemmPlan*>& slot = small[static_cast<size_t>(m)];
    if (const QgemmPlan* const plan = slot.load(std::memory_order_acquire)) return *plan;
    QgemmPlan selected = select(m);
    const std::lock_guard lock(mutex);
    if (const QgemmPlan* const plan = slot.load(std::memory_order_relaxed)) return *plan;
    slot.store(&owned.emplace_back(selected), std::memory_order_release);
    return selected;
  }
  QgemmPlan other_at(int64_t m) {
    {
      const std::lock_guard lock(mutex);
      if (const QgemmPlan* const plan = use(m)) return *plan;
    }
    QgemmPlan selected = select(m);
    const std::lock_guard lock(mutex);
    if (const QgemmPlan* const plan = use(m)) return *plan;
    if (std::ssize(others) == kMostOthers) others.erase(others.begin());
    return others.emplace_back(std::move(selected));
  }

 private:
  // Makes it the last that was used; null: it is not there. With the lock.
  const QgemmPlan* use(int64_t m) {
    const auto found = std::find_if(others.rbegin(), others.rend(),
                                    [m](const QgemmPlan& plan) { return plan.descriptor().m == m; });
    if (found == others.rend()) return nullptr;
    std::rotate(found.base() - 1, found.base(), others.end());
    return &others.back();
  }
};

namespace {

QgemmDescriptor without_rows(QgemmDescriptor descriptor) {
  descriptor.m = 0;
  return descriptor;
}

}  // namespace

QgemmPlans::QgemmPlans(Device device, const QgemmDescriptor& descriptor, const PlanPreference& preference)
    : plans_(std::make_shared<Plans>(device, without_rows(descriptor), preference)) {}

Device QgemmPlans::device() const { return plans_->empty.device(); }
const QgemmDescriptor& QgemmPlans::descriptor() const { return plans_->empty.descriptor(); }

QgemmPlan QgemmPlans::at(int64_t m) const {
  return m >= 0 && m <= kSmall ? plans_->small_at(m) : plans_->other_at(m);
}

void QgemmPlans::run(void* stream, const Workspace& workspace, const Qgemm::Args& args) const {
  HALFBYTE_MUST(args.x.shape.size() == 2, invalid_argument, "qgemm", "x", "have", "2 axes",
                fmt::format("the shape {}", text_of(args.x.shape)));
  at(args.x.shape[0]).run(stream, workspace, args);
}

}  // namespace halfbyte
