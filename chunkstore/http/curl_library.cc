// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/curl_library.h"

#include <dlfcn.h>

#include <cstdlib>

namespace lamina::http {
namespace {

constexpr const char* kFile = "libcurl.so.4";

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

absl::StatusOr<CurlLibrary> Load() {
  // Never closed: it has threads and handlers of its own.
  void* const library = ::dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        fmt::format("registries need libcurl (Debian: libcurl4): {}", ::dlerror()));
  }
  CurlLibrary curl{};
  bool complete = true;
#define LAMINA_CURL(name) complete = Find(library, "curl_" #name, &curl.name) && complete
  LAMINA_CURL(easy_cleanup);
  LAMINA_CURL(easy_getinfo);
  LAMINA_CURL(easy_init);
  LAMINA_CURL(easy_pause);
  LAMINA_CURL(easy_setopt);
  LAMINA_CURL(easy_strerror);
  LAMINA_CURL(free);
  LAMINA_CURL(getdate);
  LAMINA_CURL(global_init);
  LAMINA_CURL(multi_add_handle);
  LAMINA_CURL(multi_cleanup);
  LAMINA_CURL(multi_info_read);
  LAMINA_CURL(multi_init);
  LAMINA_CURL(multi_perform);
  LAMINA_CURL(multi_poll);
  LAMINA_CURL(multi_remove_handle);
  LAMINA_CURL(multi_setopt);
  LAMINA_CURL(multi_strerror);
  LAMINA_CURL(multi_wakeup);
  LAMINA_CURL(slist_append);
  LAMINA_CURL(slist_free_all);
  LAMINA_CURL(url);
  LAMINA_CURL(url_cleanup);
  LAMINA_CURL(url_get);
  LAMINA_CURL(url_set);
  LAMINA_CURL(url_strerror);
#undef LAMINA_CURL
  if (!complete) {
    return absl::FailedPreconditionError(fmt::format("{} is older than 7.85", kFile));
  }
  if (const CURLcode code = curl.global_init(CURL_GLOBAL_DEFAULT); code != CURLE_OK) {
    return absl::InternalError(fmt::format("libcurl: {}", curl.easy_strerror(code)));
  }
  return curl;
}

const absl::StatusOr<CurlLibrary>& Loaded() {
  static const absl::StatusOr<CurlLibrary> loaded = Load();
  return loaded;
}

}  // namespace

absl::Status LoadCurl() { return Loaded().status(); }

const CurlLibrary& Curl() { return *Loaded(); }

}  // namespace lamina::http
