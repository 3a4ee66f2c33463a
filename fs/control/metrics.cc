// SPDX-License-Identifier: Apache-2.0
#include "fs/control/metrics.h"

#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

namespace lamina::fs {
namespace {

using chunkstore::LatencyHistogram;
using chunkstore::ReadStats;
using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// Upper bounds, from what the page cache gives to what a registry far away takes.
constexpr std::chrono::microseconds kBounds[] = {std::chrono::microseconds(10),
                                                 std::chrono::microseconds(32),
                                                 std::chrono::microseconds(100),
                                                 std::chrono::microseconds(320),
                                                 std::chrono::microseconds(1'000),
                                                 std::chrono::microseconds(3'200),
                                                 std::chrono::microseconds(10'000),
                                                 std::chrono::microseconds(32'000),
                                                 std::chrono::microseconds(100'000),
                                                 std::chrono::microseconds(320'000),
                                                 std::chrono::seconds(1),
                                                 std::chrono::milliseconds(3'200),
                                                 std::chrono::seconds(10),
                                                 std::chrono::seconds(32)};

struct Counter {
  const char* name;
  const char* help;
  std::atomic<uint64_t> ReadStats::*value;
};
constexpr Counter kCounters[] = {
    {"lamina_reads_total", "Read requests of the kernel.", &ReadStats::read_requests},
    {"lamina_read_bytes_total", "Bytes that they asked for.", &ReadStats::read_bytes},
    {"lamina_read_misses_total", "Read requests that had to wait for a fetch.",
     &ReadStats::missed_requests},
    {"lamina_read_failures_total", "Read requests that were answered with an error.",
     &ReadStats::failed_requests},
    {"lamina_origin_requests_total", "Requests made of origins.", &ReadStats::origin_requests},
    {"lamina_fetched_bytes_total", "Bytes that came from origins, compressed.",
     &ReadStats::fetched_bytes},
    {"lamina_fetched_frames_total", "Frames that came from origins.", &ReadStats::fetched_frames},
    {"lamina_copied_frames_total", "Frames that were copied from other blobs of the node.",
     &ReadStats::copied_frames},
    {"lamina_decompressed_bytes_total", "Bytes that were decompressed.",
     &ReadStats::decompressed_bytes},
    {"lamina_written_bytes_total", "Bytes that were written to the node's disk.",
     &ReadStats::written_bytes},
};

ClientMetric Metric(Labels labels) {
  ClientMetric metric;
  metric.label = std::move(labels);
  return metric;
}

ClientMetric CounterOf(Labels labels, uint64_t value) {
  ClientMetric metric = Metric(std::move(labels));
  metric.counter.value = static_cast<double>(value);
  return metric;
}

ClientMetric GaugeOf(Labels labels, double value) {
  ClientMetric metric = Metric(std::move(labels));
  metric.gauge.value = value;
  return metric;
}

ClientMetric HistogramOf(Labels labels, const LatencyHistogram& latency) {
  ClientMetric metric = Metric(std::move(labels));
  // Others may be adding: the total comes last, so that no bucket has more.
  for (const std::chrono::nanoseconds bound : kBounds) {
    metric.histogram.bucket.push_back(
        {latency.CountUpTo(bound), std::chrono::duration<double>(bound).count()});
  }
  metric.histogram.sample_sum = std::chrono::duration<double>(latency.sum()).count();
  metric.histogram.sample_count = latency.count();
  metric.histogram.bucket.push_back(
      {metric.histogram.sample_count, std::numeric_limits<double>::infinity()});
  return metric;
}

// Where an image comes from, without its name there: "oci:/srv/images:debian" is from
// "oci:/srv/images".
std::string OriginOf(const std::string& image) {
  const size_t slash = image.rfind('/');
  const size_t end = image.find_first_of(":@", slash == std::string::npos ? 0 : slash);
  return image.substr(0, end);
}

// "NOT_FOUND" as "not_found".
std::string KindOf(size_t code) {
  std::string kind = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
  for (char& c : kind) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return kind;
}

void AddImages(const std::vector<ImageReport>& images, std::vector<MetricFamily>& families) {
  for (const Counter& counter : kCounters) {
    MetricFamily family{counter.name, counter.help, MetricType::Counter, {}};
    for (const ImageReport& image : images) {
      family.metric.push_back(CounterOf({{"image", image.image}}, (*image.stats).*(counter.value)));
    }
    families.push_back(std::move(family));
  }
  MetricFamily mounts{"lamina_mounts", "Mounts.", MetricType::Gauge, {}};
  MetricFamily frames{"lamina_frames", "Frames of the image.", MetricType::Gauge, {}};
  MetricFamily present{"lamina_frames_present", "Those on the node.", MetricType::Gauge, {}};
  MetricFamily waiting{"lamina_reads_in_flight",
                       "Read requests that wait for a fetch just now.",
                       MetricType::Gauge,
                       {}};
  MetricFamily errors{"lamina_fetch_errors_total",
                      "Read requests that failed because of a fetch, by kind of error.",
                      MetricType::Counter,
                      {}};
  MetricFamily latency{
      "lamina_read_duration_seconds",
      "From a read request to its answer: hits from the node, misses after a fetch.",
      MetricType::Histogram,
      {}};
  for (const ImageReport& image : images) {
    const ClientMetric::Label label{"image", image.image};
    mounts.metric.push_back(GaugeOf({label}, static_cast<double>(image.mounts)));
    frames.metric.push_back(GaugeOf({label}, static_cast<double>(image.frames)));
    present.metric.push_back(GaugeOf({label}, static_cast<double>(image.frames_present)));
    waiting.metric.push_back(
        GaugeOf({label}, static_cast<double>(image.stats->waiting_requests.load())));
    for (size_t code = 0; code < image.stats->errors.size(); ++code) {
      const uint64_t count = image.stats->errors[code];
      if (count == 0) continue;
      errors.metric.push_back(
          CounterOf({label, {"origin", OriginOf(image.image)}, {"kind", KindOf(code)}}, count));
    }
    latency.metric.push_back(HistogramOf({label, {"result", "hit"}}, image.stats->hit_latency));
    latency.metric.push_back(HistogramOf({label, {"result", "miss"}}, image.stats->miss_latency));
  }
  for (MetricFamily* family : {&mounts, &frames, &present, &waiting, &errors, &latency}) {
    families.push_back(std::move(*family));
  }
}

// Under the names that Prometheus' own libraries have for it.
void AddProcess(std::vector<MetricFamily>& families) {
  uint64_t size = 0;
  uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;  // in pages (proc(5))
  const auto bytes = static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  families.push_back({"process_resident_memory_bytes",
                      "Resident memory of the worker.",
                      MetricType::Gauge,
                      {GaugeOf({}, bytes)}});
}

}  // namespace

std::string MetricsText(Engine& engine) {
  std::vector<MetricFamily> families;
  AddImages(engine.ReportImages(), families);
  AddProcess(families);
  std::erase_if(families, [](const MetricFamily& family) { return family.metric.empty(); });
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace lamina::fs
