// SPDX-License-Identifier: Apache-2.0
//
// libcurl, loaded when it is first needed. With the forty libraries it depends on it takes longer to
// load than most commands take to run, and most commands have nothing to do with HTTP. It also brings
// its own OpenSSL, which must not be mixed with one that is linked statically.
#ifndef LAMINA_CHUNKSTORE_HTTP_CURL_LIBRARY_H_
#define LAMINA_CHUNKSTORE_HTTP_CURL_LIBRARY_H_

#include <curl/curl.h>

#include "chunkstore/base/status.h"

namespace lamina::http {

// The functions of libcurl that are used, by their names without "curl_".
struct CurlLibrary {
  decltype(&::curl_easy_cleanup) easy_cleanup;
  decltype(&::curl_easy_getinfo) easy_getinfo;
  decltype(&::curl_easy_init) easy_init;
  decltype(&::curl_easy_pause) easy_pause;
  decltype(&::curl_easy_setopt) easy_setopt;
  decltype(&::curl_easy_strerror) easy_strerror;
  decltype(&::curl_free) free;
  decltype(&::curl_getdate) getdate;
  decltype(&::curl_global_init) global_init;
  decltype(&::curl_multi_add_handle) multi_add_handle;
  decltype(&::curl_multi_cleanup) multi_cleanup;
  decltype(&::curl_multi_info_read) multi_info_read;
  decltype(&::curl_multi_init) multi_init;
  decltype(&::curl_multi_perform) multi_perform;
  decltype(&::curl_multi_poll) multi_poll;
  decltype(&::curl_multi_remove_handle) multi_remove_handle;
  decltype(&::curl_multi_setopt) multi_setopt;
  decltype(&::curl_multi_strerror) multi_strerror;
  decltype(&::curl_multi_wakeup) multi_wakeup;
  decltype(&::curl_slist_append) slist_append;
  decltype(&::curl_slist_free_all) slist_free_all;
  decltype(&::curl_url) url;
  decltype(&::curl_url_cleanup) url_cleanup;
  decltype(&::curl_url_get) url_get;
  decltype(&::curl_url_set) url_set;
  decltype(&::curl_url_strerror) url_strerror;
};

// Loads and initialises it, once; kFailedPrecondition if it is not installed. Any thread.
absl::Status LoadCurl();
// After LoadCurl() has succeeded.
const CurlLibrary& Curl();

}  // namespace lamina::http

#endif  // LAMINA_CHUNKSTORE_HTTP_CURL_LIBRARY_H_
