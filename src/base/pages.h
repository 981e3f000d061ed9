/* pages.h: the operating system's pages. */
#ifndef KVC_PAGES_H
#define KVC_PAGES_H

#include <stddef.h>

enum { KVC_HUGE_PAGE = 2 << 20 };

/* Whether these functions do anything on this system; elsewhere nothing can be mapped or returned. */
#if defined(_WIN32)
enum { KVC_HAS_PAGES = 0 };
#else
enum { KVC_HAS_PAGES = 1 };
#endif

size_t kvc_os_page_size(void);

/* Maps memory that is taken only as it is touched, aligned to a huge page where one fits in; NULL on failure. */
void *kvc_pages_map(size_t size);
void kvc_pages_unmap(void *p, size_t size);

/* Returns whole pages to the system; they stay addressable and lose their contents. */
void kvc_pages_drop(void *p, size_t size);

/* Joins pages that are written already into huge pages, where the system can.  Unlike advice given beforehand, this
 * takes no memory for what is not written.  Returns whether it succeeded. */
int kvc_pages_join(void *p, size_t size);

/* Takes memory for all pages that overlap [p, p + size), whose contents stay.  Returns whether the system supports it.
 */
int kvc_pages_take(void *p, size_t size);

#endif
